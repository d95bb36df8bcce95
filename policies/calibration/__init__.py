"""Costs of a pass and a draft on this device with this model: measured, fitted, corrected while an engine runs."""
