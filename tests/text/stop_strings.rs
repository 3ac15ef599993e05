//! Stop strings are never seen, however they are cut.

use super::support::Watch;
use xserv::text::{StopMatcher, MAX_STOP_STRINGS, MAX_STOP_STRING_BYTES};

/// Text and index of the match, fed in the given pieces.
fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
    let mut matcher = StopMatcher::new(stops).unwrap();
    let mut text = String::new();
    for piece in pieces {
        let output = matcher.push(piece).unwrap();
        text.push_str(&output.text);
        if output.matched.is_some() {
            assert_eq!(matcher.push("more").unwrap().text, "");
            assert_eq!(matcher.finish(), "");
            return (text, output.matched);
        }
    }
    text.push_str(&matcher.finish());
    (text, None)
}

/// Returns the text before the first complete stop string, by looking at the whole.
fn reference(stops: &[&str], whole: &str) -> (String, Option<usize>) {
    for end in 1..=whole.len() {
        let longest = stops
            .iter()
            .enumerate()
            .filter(|(_, stop)| whole.as_bytes()[..end].ends_with(stop.as_bytes()))
            .max_by_key(|(index, stop)| (stop.len(), usize::MAX - index));
        if let Some((index, stop)) = longest {
            return (whole[..end - stop.len()].to_owned(), Some(index));
        }
    }
    (whole.to_owned(), None)
}

#[test]
fn every_cut_of_every_text() {
    let cases: [(&[&str], &str); 9] = [
        (&["END"], "one END two"),
        (&["aab"], "aaaaab"),
        (&["abcd", "bc"], "xabcd"),
        (&["ab", "abc"], "xxabc"),
        (&["\n\nUser:", "\n\nU"], "hi\n\n\nUser: x"),
        (&["日本", "本語"], "日日本語"),
        (&["🎉"], "a🎊🎉b"),
        (&["abab"], "abaabab"),
        (&["zzz"], "never zz"),
    ];
    for (stops, whole) in cases {
        let expected = reference(stops, whole);
        let characters: Vec<usize> =
            whole.char_indices().map(|(at, _)| at).chain([whole.len()]).collect();
        for &first in &characters {
            for &second in characters.iter().filter(|at| **at >= first) {
                let pieces = [&whole[..first], &whole[first..second], &whole[second..]];
                assert_eq!(run(stops, &pieces), expected, "{stops:?} {pieces:?}");
            }
        }
        let singles: Vec<&str> = characters.windows(2).map(|w| &whole[w[0]..w[1]]).collect();
        assert_eq!(run(stops, &singles), expected, "{stops:?}, character by character");
    }
}

/// Nothing is held back longer than needed.
#[test]
fn text_is_released_as_soon_as_it_can_be() {
    let mut matcher = StopMatcher::new(&["aab"]).unwrap();
    assert_eq!(matcher.push("xa").unwrap().text, "x");
    assert_eq!(matcher.push("a").unwrap().text, "");
    assert_eq!(matcher.push("a").unwrap().text, "a");
    assert_eq!(matcher.push("c").unwrap().text, "aac");
    assert_eq!(matcher.finish(), "");
    let mut without = StopMatcher::new::<&str>(&[]).unwrap();
    assert!(without.is_empty());
    assert_eq!(without.push("abc").unwrap().text, "abc");
}

#[test]
fn random_texts_agree_with_the_reference() {
    let mut state = 7u64;
    let mut next = |bound: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % bound
    };
    for _ in 0..3000 {
        let mut word = |length: u64| -> String {
            (0..length).map(|_| char::from(b'a' + next(2) as u8)).collect()
        };
        let stops = [word(2), word(3), word(5)];
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let whole = word(12);
        let pieces: Vec<&str> = (0..whole.len()).map(|at| &whole[at..at + 1]).collect();
        assert_eq!(run(&stops, &pieces), reference(&stops, &whole), "{stops:?} {whole}");
    }
}

#[test]
fn bounds() {
    let many = vec!["x"; 1_000_000];
    let error = StopMatcher::new(&many).unwrap_err();
    assert!(error.message().contains("1000000 stop strings"), "{error}");
    assert!(StopMatcher::new(&many[..MAX_STOP_STRINGS]).is_ok());
    assert!(StopMatcher::new(&["a", ""]).unwrap_err().message().contains("stop string 1 is empty"));
    let long = "x".repeat(MAX_STOP_STRING_BYTES);
    assert!(StopMatcher::new(&[&long]).is_ok());
    let longer = long + "x";
    assert!(StopMatcher::new(&["a", &longer]).unwrap_err().message().contains("stop string 1"));
}

/// The worst texts for the automaton take linear time.
#[test]
fn time_is_linear() {
    let stops: Vec<String> = (0..64).map(|n| "a".repeat(1000) + &n.to_string()).collect();
    let mut matcher = StopMatcher::new(&stops).unwrap();
    let begin = Watch::start();
    for _ in 0..20_000 {
        matcher.push("aaaaa").unwrap();
    }
    assert!(begin.elapsed().as_secs() < 5, "{:?}", begin.elapsed());
}
