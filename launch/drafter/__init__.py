"""Training of the drafter as the driver sees it: its actors and weights, the watch over it, the offline fit, export."""
