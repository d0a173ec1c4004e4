//! Where in a text a path leads: `plugins[0].mtu` to the line and column of the key `mtu`.
//!
//! The text is known to be JSON. A path that leads nowhere is the place of as much of it as there
//! is. `@L:C` is a place already.

/// Line and column, from 1, of the last step of `path` that is there.
pub(super) fn find(text: &str, path: &str) -> (usize, usize) {
    if let Some((line, column)) = path.strip_prefix('@').and_then(|place| place.split_once(':')) {
        return (line.parse().unwrap_or(1), column.parse().unwrap_or(1));
    }
    let mut scanner = Scanner { text: text.as_bytes(), at: 0, best: None, wanted: path };
    scanner.value("");
    let at = scanner.best.map_or(0, |(_, at)| at);
    let before = &text[..at];
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    (line, column)
}

struct Scanner<'a> {
    text: &'a [u8],
    at: usize,
    /// How long the path is that was found, and where it is.
    best: Option<(usize, usize)>,
    wanted: &'a str,
}

impl Scanner<'_> {
    fn peek(&mut self) -> u8 {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied().unwrap_or_default()
    }

    fn reached(&mut self, path: &str, at: usize) {
        let ends = |rest: &str| rest.is_empty() || rest.starts_with(['.', '[']);
        let leads = self.wanted.get(..path.len()).is_some_and(|head| head.eq_ignore_ascii_case(path));
        // If a key occurs twice, the last one counts.
        if leads && ends(&self.wanted[path.len()..]) && self.best.is_none_or(|(length, _)| length <= path.len()) {
            self.best = Some((path.len(), at));
        }
    }

    fn value(&mut self, path: &str) {
        match self.peek() {
            b'{' => self.members(path),
            b'[' => self.items(path),
            b'"' => drop(self.string()),
            _ => {
                let is_part = |byte: &u8| !matches!(byte, b',' | b'}' | b']') && !byte.is_ascii_whitespace();
                while self.text.get(self.at).is_some_and(is_part) {
                    self.at += 1;
                }
            }
        }
    }

    fn members(&mut self, path: &str) {
        self.at += 1;
        while self.peek() == b'"' {
            let at = self.at;
            let key = self.string();
            let path = if path.is_empty() { key } else { format!("{path}.{key}") };
            self.reached(&path, at);
            if self.peek() == b':' {
                self.at += 1;
            }
            self.value(&path);
            if self.peek() == b',' {
                self.at += 1;
            }
        }
        self.at += 1;
    }

    fn items(&mut self, path: &str) {
        self.at += 1;
        let mut index = 0;
        while !matches!(self.peek(), b']' | 0) {
            let path = format!("{path}[{index}]");
            let at = self.at;
            self.reached(&path, at);
            self.value(&path);
            index += 1;
            if self.peek() == b',' {
                self.at += 1;
            }
        }
        self.at += 1;
    }

    /// A string with its quotes; what is escaped in a key stays so.
    fn string(&mut self) -> String {
        let begin = self.at + 1;
        self.at = begin;
        while let Some(byte) = self.text.get(self.at) {
            match byte {
                b'\\' => self.at += 2,
                b'"' => break,
                _ => self.at += 1,
            }
        }
        let end = self.at.min(self.text.len());
        self.at += 1;
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
