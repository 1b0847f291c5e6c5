"""HTTP bodies, server-sent events, WebSocket frames, and the outbox of a slow client."""
