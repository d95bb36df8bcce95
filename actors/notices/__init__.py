"""Notices of a cloud's metadata service about the end of a node: one adapter per cloud, and the loop that polls it.

No Ray. Adapters are pure: the next request, and the meaning of an answer. The only action is an acknowledgement in
Azure's protocol (see azure.py). Training and sampling never wait for any of it.
"""
