"""What is kept of ended requests: records, spans, waterfalls."""
