"""The live channel: an editor's buffers mirrored here, answered at every key."""
