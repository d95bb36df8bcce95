"""What a cloud's metadata service says about the end of a node: one adapter per cloud, and the loop that asks it.

Nothing here knows Ray. Adapters are pure: what to ask next, and what an answer means. They take no action but the one
that Azure's protocol has (see azure.py), and nobody who trains or samples ever waits for any of it.
"""
