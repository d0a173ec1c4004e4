//! Finds the position of a path in a JSON text: for `plugins[0].mtu` the line and column of the key
//! `mtu`.

/// Returns the line and column, both from 1, of the key or list element that `path` leads to in
/// `text`, which must be JSON. If it does not exist, returns the position of its nearest existing
/// parent. A path `@<line>:<column>` is a position already.
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

/// A scan of a JSON text from the beginning, which looks for a path.
struct Scanner<'a> {
    text: &'a [u8],
    /// The offset of the next byte.
    offset: usize,
    /// The longest beginning of the sought path that was found so far.
    best: Option<Match>,
    /// The sought path.
    sought: &'a str,
}

/// A beginning of the sought path that was found in the text.
struct Match {
    /// The length of the beginning in bytes.
    path_len: usize,
    /// The offset of its last key or element in the text.
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

    /// Records that the key or element `path` is at `offset`, if the sought path begins with `path`
    /// and the beginning that was found so far is not longer. Of duplicate keys the last one
    /// counts.
    fn record(&mut self, path: &str, offset: usize) {
        let Some((beginning, rest)) = self.sought.split_at_checked(path.len()) else { return };
        // `plugins[0].mt` is not a beginning of `plugins[0].mtu`.
        let ends_with_step = rest.is_empty() || rest.starts_with(['.', '[']);
        let is_longest = self.best.as_ref().is_none_or(|best| best.path_len <= path.len());
        if beginning.eq_ignore_ascii_case(path) && ends_with_step && is_longest {
            self.best = Some(Match { path_len: path.len(), offset });
        }
    }

    /// Scans the value of the key or element `path`.
    fn scan_value(&mut self, path: &str) {
        match self.peek() {
            b'{' => self.scan_object(path),
            b'[' => self.scan_array(path),
            // Only the content of keys matters.
            b'"' => drop(self.scan_string()),
            _ => {
                let is_part = |byte: &u8| !matches!(byte, b',' | b'}' | b']') && !byte.is_ascii_whitespace();
                while self.text.get(self.offset).is_some_and(is_part) {
                    self.offset += 1;
                }
            }
        }
    }

    /// Scans an object from its opening brace on.
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

    /// Scans a list from its opening bracket on.
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

    /// Scans a string from its opening quote on. Returns its content, with escape sequences as they
    /// are.
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
