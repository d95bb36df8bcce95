"""What keys of verl, TRL, OpenRLHF and prime-rl, and of earlier versions, are here: names.yaml and its lookup."""
