"""The coordinator on ZeroMQ: the only place, beside the admin service, that uses sockets."""
