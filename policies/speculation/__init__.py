"""The choice of drafter, depth and width for each step, or of plain decoding: pure decisions from counts
and seconds.
"""
