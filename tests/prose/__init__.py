"""What the project's words keep to: short sentences, the field's terms, topics as headings."""
