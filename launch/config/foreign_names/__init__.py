"""What verl, TRL, OpenRLHF and prime-rl, and earlier versions, call things. Owns the table only."""
