//! Classes of characters in patterns.

/// Returns a pattern whose classes that exclude characters exclude U+0001 too: of classes with all control characters
/// the crate allows a quotation mark and a backslash in a JSON string, even if they exclude these.
pub(super) fn precise(pattern: &str) -> String {
    let mut found = String::new();
    let mut rest = pattern.chars().peekable();
    while let Some(character) = rest.next() {
        found.push(character);
        if character == '\\' {
            found.extend(rest.next());
        } else if character == '[' && rest.next_if_eq(&'^').is_some() {
            found.push_str("^\\x01");
            // At the beginning these stand for themselves.
            if matches!(rest.peek(), Some(']' | '-')) {
                found.push('\\');
                found.extend(rest.next());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_that_exclude_are_found() {
        for (pattern, expected) in [
            ("^[^\"]*$", "^[^\\x01\"]*$"),
            ("[^]a][^-b][a^]", "[^\\x01\\]a][^\\x01\\-b][a^]"),
            ("\\[^a\\\\[^\\]]", "\\[^a\\\\[^\\x01\\]]"),
            ("[", "["),
        ] {
            assert_eq!(precise(pattern), expected);
        }
    }
}
