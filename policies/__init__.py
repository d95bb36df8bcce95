"""Pure decisions and learning rules: no Ray, no I/O, no clock."""
