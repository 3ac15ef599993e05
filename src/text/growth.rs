//! Bounds how long a text can become under a normalizer.

use serde_json::Value;

/// Returns the most bytes that the normalizer of this JSON, other than `Replace` with a regular
/// expression, can make of `text`. Unlike the factors of `tokenizer_components.rs`, which hold for
/// any text, this is for one: a few characters grow to eleven times their length under NFKC, which
/// no ordinary text does.
pub(super) fn most_bytes(json: &Value, text: &str) -> usize {
    let field = |key: &str| json.get(key).and_then(Value::as_str).unwrap_or_default();
    let len = text.len();
    match json.get("type").and_then(Value::as_str).unwrap_or_default() {
        "NFC" | "NFD" | "NFKC" | "NFKD" => text
            .chars()
            .fold(0, |sum: usize, c| sum.saturating_add(most_decomposed(c) * c.len_utf8())),
        "Lowercase" | "ByteLevel" => len.saturating_mul(2),
        // Decomposes, sets blanks around ideographs and takes the lower case.
        "BertNormalizer" => len.saturating_mul(5),
        "Prepend" => len.saturating_add(field("prepend").len()),
        "Replace" => {
            let pattern = json.get("pattern").and_then(|p| p.get("String"));
            let pattern = pattern.and_then(Value::as_str).unwrap_or_default();
            let count = if pattern.is_empty() {
                len.saturating_add(1)
            } else {
                text.matches(pattern).count()
            };
            len.saturating_add(count.saturating_mul(field("content").len()))
        }
        // The others take away, or put a character in place of a longer one.
        _ => len,
    }
}

/// Returns the factor by which a decomposition can lengthen a character. U+FDFA is eighteen
/// letters, the squared words of U+3300 and following are up to six.
fn most_decomposed(character: char) -> usize {
    match character {
        '\0'..='\u{7f}' => 1,
        '\u{fb50}'..='\u{fdff}' => 11,
        '\u{2000}'..='\u{33ff}' => 6,
        _ => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::most_bytes;
    use serde_json::json;
    use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

    #[test]
    fn no_character_becomes_longer_than_its_bound() {
        for kind in ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel", "BertNormalizer"] {
            let json = match kind {
                "BertNormalizer" => json!({"type": kind, "clean_text": true, "lowercase": true,
                    "handle_chinese_chars": true, "strip_accents": false}),
                _ => json!({"type": kind}),
            };
            let step: NormalizerWrapper = serde_json::from_value(json.clone()).unwrap();
            for character in '\0'..=char::MAX {
                let text = character.to_string();
                let mut made = NormalizedString::from(text.as_str());
                step.normalize(&mut made).unwrap();
                let most = most_bytes(&json, &text);
                assert!(made.len() <= most, "{kind} makes {} bytes of {character:?}", made.len());
            }
        }
    }
}
