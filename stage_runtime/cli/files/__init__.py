"""Commands about a pipeline's file, without running it: init, validate, plan, convert."""
