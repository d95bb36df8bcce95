"""The admin service of a coordinator (gRPC): what people and scripts see of it, and the few things they may ask."""
