"""Training of drafters. Importing the package needs no torch, since supervisors only pass records along."""
