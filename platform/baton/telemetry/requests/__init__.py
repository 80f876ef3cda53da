"""Records of ended requests: reports, spans, waterfalls."""
