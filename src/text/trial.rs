//! Texts on which bad regular expressions show.

use std::collections::BTreeSet;

/// The most letters of the expressions that are tried.
const MAX_LETTERS: usize = 48;
/// The lengths of the texts, in characters.
const LENGTHS: [usize; 12] = [8, 12, 16, 20, 24, 32, 48, 64, 128, 512, 1024, 2048];
const LENGTHS_OF_LETTERS: [usize; 5] = [8, 16, 32, 64, 256];
/// The units that the texts repeat, and their ends.
const UNITS: [(&str, &str); 10] = [
    ("a", ""),
    ("a", "!"),
    ("ab", ""),
    ("ab", "!"),
    ("ab ", "\n"),
    (" ", ""),
    (" ", "a"),
    ("1", "a"),
    ("!", ""),
    ("\n", "a"),
];

/// Returns the texts for these expressions, short ones first: repetitions of ordinary characters,
/// and of those that the expressions themselves name, on which they branch.
pub(super) fn trial_texts(patterns: &[String]) -> Vec<String> {
    let letters = letters(patterns);
    let mut texts = Vec::new();
    for length in LENGTHS {
        for (unit, end) in UNITS {
            texts.push(format!("{}{end}", unit.repeat(length / unit.len())));
        }
        if LENGTHS_OF_LETTERS.contains(&length) {
            for letter in &letters {
                let text = letter.to_string().repeat(length);
                texts.push(format!("{text}!"));
                texts.push(text);
            }
        }
    }
    texts
}

/// Returns the characters that the expressions name, as themselves or by number, the rarest kinds
/// first.
fn letters(patterns: &[String]) -> Vec<char> {
    let mut letters = BTreeSet::new();
    for pattern in patterns {
        letters.extend(pattern.chars());
        letters.extend(pattern.split('\\').skip(1).filter_map(numbered));
    }
    // From the highest: letters beyond ASCII are not among the ordinary texts.
    letters.into_iter().rev().take(MAX_LETTERS).collect()
}

/// Returns the character that `x41`, `x{1F600}`, `u0041`, `u{41}` or `U00000041` stands for, which
/// follow a backslash.
fn numbered(escape: &str) -> Option<char> {
    let (kind, rest) = escape.split_at_checked(1)?;
    let digits = match (kind, rest.strip_prefix('{')) {
        ("x" | "u" | "U", Some(inside)) => inside.split('}').next()?,
        ("x", None) => rest.get(..2)?,
        ("u", None) => rest.get(..4)?,
        ("U", None) => rest.get(..8)?,
        _ => return None,
    };
    char::from_u32(u32::from_str_radix(digits, 16).ok()?)
}
