"""Ray from the driver's side: starting or joining it, watching it, ending what it leaves."""
