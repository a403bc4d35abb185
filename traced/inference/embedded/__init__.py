"""The embedded engine: continuous batching over transformers and PEFT, in-process or over HTTP."""
