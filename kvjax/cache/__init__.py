"""The KV-cache method: its protocol, its components, and their composition."""
