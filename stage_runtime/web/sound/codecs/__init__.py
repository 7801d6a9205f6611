"""Samples to the formats that clients ask for, and the files that clients send. Called by `codec_session`."""
