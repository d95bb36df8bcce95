"""What drafts, and how drafters learn. So far the seam that an engine calls: `protocol`."""
