"""The admin service of a coordinator (gRPC): status, and commands from people and scripts."""
