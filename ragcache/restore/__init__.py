"""From rest to KV in memory."""
