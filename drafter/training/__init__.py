"""How drafters learn. Importing the package itself needs no torch: supervisors pass records along."""
