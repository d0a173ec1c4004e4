//! Finds the line and column of a path in a JSON text, for example of the key `mtu` for
//! `plugins[0].mtu`.

/// Returns the line and column, both from 1, of the key or list element that `path` leads to in the
/// JSON `text`, or of its nearest existing parent if it does not exist. For a path
/// `@<line>:<column>`, returns that position.
pub(super) fn find(text: &str, path: &str) -> (usize, usize) {
    if let Some((line, column)) = path.strip_prefix('@').and_then(|position| position.split_once(':')) {
        return (line.parse().unwrap_or(1), column.parse().unwrap_or(1));
    }
    let mut scanner = Scanner { text: text.as_bytes(), offset: 0, best: None, sought: path };
    scanner.scan_value("");
    let offset = scanner.best.map_or(0, |best| best.offset);
    let before = &text[..offset];
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    (line, column)
}

/// A scan of a JSON text for a path.
struct Scanner<'a> {
    text: &'a [u8],
    /// The offset of the next byte.
    offset: usize,
    /// The key or element found so far whose path has the most in common with the sought path.
    best: Option<Match>,
    sought: &'a str,
}

/// A key or element in the text whose path is the sought path or a parent of it.
struct Match {
    /// The length of its path in bytes.
    path_len: usize,
    /// Its offset in the text.
    offset: usize,
}

impl Scanner<'_> {
    /// Skips white space. Returns the next byte without skipping it, or 0 at the end.
    fn peek(&mut self) -> u8 {
        while self.text.get(self.offset).is_some_and(u8::is_ascii_whitespace) {
            self.offset += 1;
        }
        self.text.get(self.offset).copied().unwrap_or_default()
    }

    /// Records the key or element `path` at `offset` as the best match, if `path` is the sought
    /// path or a parent of it and the best match so far is not longer. Of duplicate keys, the last
    /// one is recorded.
    fn record(&mut self, path: &str, offset: usize) {
        let Some((beginning, rest)) = self.sought.split_at_checked(path.len()) else { return };
        // `plugins[0].mt` is not a parent of `plugins[0].mtu`.
        let is_parent_or_same =
            beginning.eq_ignore_ascii_case(path) && (rest.is_empty() || rest.starts_with(['.', '[']));
        let is_longest = self.best.as_ref().is_none_or(|best| best.path_len <= path.len());
        if is_parent_or_same && is_longest {
            self.best = Some(Match { path_len: path.len(), offset });
        }
    }

    /// Scans the value at `path`, and records the keys and elements in it.
    fn scan_value(&mut self, path: &str) {
        match self.peek() {
            b'{' => self.scan_object(path),
            b'[' => self.scan_array(path),
            b'"' => drop(self.scan_string()),
            _ => {
                let is_part = |byte: &u8| !matches!(byte, b',' | b'}' | b']') && !byte.is_ascii_whitespace();
                while self.text.get(self.offset).is_some_and(is_part) {
                    self.offset += 1;
                }
            }
        }
    }

    /// Scans an object, starting at its opening brace.
    fn scan_object(&mut self, path: &str) {
        self.offset += 1;
        while self.peek() == b'"' {
            let offset = self.offset;
            let key = self.scan_string();
            let path = if path.is_empty() { key } else { format!("{path}.{key}") };
            self.record(&path, offset);
            if self.peek() == b':' {
                self.offset += 1;
            }
            self.scan_value(&path);
            if self.peek() == b',' {
                self.offset += 1;
            }
        }
        self.offset += 1;
    }

    /// Scans a list, starting at its opening bracket.
    fn scan_array(&mut self, path: &str) {
        self.offset += 1;
        let mut index = 0;
        while !matches!(self.peek(), b']' | 0) {
            let path = format!("{path}[{index}]");
            let offset = self.offset;
            self.record(&path, offset);
            self.scan_value(&path);
            index += 1;
            if self.peek() == b',' {
                self.offset += 1;
            }
        }
        self.offset += 1;
    }

    /// Scans a string, starting at its opening quote. Returns its content without decoding escape
    /// sequences.
    fn scan_string(&mut self) -> String {
        let begin = self.offset + 1;
        self.offset = begin;
        while let Some(byte) = self.text.get(self.offset) {
            match byte {
                b'\\' => self.offset += 2,
                b'"' => break,
                _ => self.offset += 1,
            }
        }
        let end = self.offset.min(self.text.len());
        self.offset += 1;
        String::from_utf8_lossy(self.text.get(begin..end).unwrap_or_default()).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_leads_to_its_key_or_as_far_as_there_is_something() {
        let text = "{\n  \"name\": \"a\\\"]\",\n  \"plugins\": [\n    {\"type\": \"x\"}, {\"MTU\": [1, 2],\n     \"ü\": 1, \"b\": {\"c\": 1}}\n  ]\n}";
        for (path, expected) in [
            ("", (1, 1)),
            ("name", (2, 3)),
            ("plugins", (3, 3)),
            ("plugins[0]", (4, 5)),
            ("plugins[1].mtu", (4, 21)),
            ("plugins[1].mtu[1]", (4, 32)),
            ("plugins[1].b.c", (5, 20)),
            ("plugins[1].b.absent", (5, 14)),
            ("plugins[7].x", (3, 3)),
            ("nam", (1, 1)),
            ("@9:8", (9, 8)),
        ] {
            assert_eq!(find(text, path), expected, "{path}");
        }
    }

    #[test]
    fn no_text_brings_it_down() {
        for text in ["", "{", "{\"a", "[1,", "{\"a\":", "\"\\", "]]]", "{,}"] {
            let _ = find(text, "a.b[3]");
        }
    }
}
