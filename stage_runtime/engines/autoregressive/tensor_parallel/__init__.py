"""One model on several ranks: what each keeps of it (`sharding`), what they send each other in a step (`ranks`)."""
