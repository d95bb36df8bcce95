"""The part of an engine around the model's forward: slots, drafts, ends of responses, meters. Imports no backend."""
