"""The admin service of a coordinator (gRPC): status, and the commands of people and scripts."""
