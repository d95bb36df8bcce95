"""The coordinator on ZeroMQ: the only place, beside the admin service, that knows a socket."""
