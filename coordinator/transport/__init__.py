"""The coordinator on ZeroMQ: besides the admin service, the only package that uses sockets."""
