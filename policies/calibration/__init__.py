"""What a pass and a draft cost on this device with this model: measured, fitted, corrected while an engine runs."""
