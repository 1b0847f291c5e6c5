"""Source text: units, lowering to the IR, suppression comments."""
