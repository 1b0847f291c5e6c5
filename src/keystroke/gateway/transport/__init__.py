"""Bytes in and out: HTTP bodies, server-sent events, WebSocket frames, the outbox of a slow client."""
