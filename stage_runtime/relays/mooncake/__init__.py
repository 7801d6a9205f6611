"""The mooncake relay: receivers read what lies in the sender's arena, by Mooncake's Transfer Engine."""
