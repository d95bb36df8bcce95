"""Other trainers' keys (verl, TRL, OpenRLHF, prime-rl) and those of earlier versions: names.yaml and its lookup."""
