"""What every engine of ours does around the forward of a model: slots, drafts, ends, meters. Imports no backend."""
