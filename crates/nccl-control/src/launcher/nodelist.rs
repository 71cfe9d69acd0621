//! Slurm's lists of hosts: `login,node[01-03,7],rack[1-2]n[1-2]`.

/// The maximum number of hosts of one list, because a list is external input.
const MOST: usize = 1 << 16;

/// The maximum length of a host name in bytes, as in DNS.
const LONGEST: usize = 253;

/// Expands the list, in order.
///
/// # Errors
/// What is wrong with the list.
pub(crate) fn expand(list: &str) -> Result<Vec<String>, &'static str> {
    let mut hosts = Vec::new();
    let mut rest = list;
    loop {
        rest = one(rest, &mut hosts)?;
        match rest.strip_prefix(',') {
            Some(more) => rest = more,
            None if rest.is_empty() => return Ok(hosts),
            None => return Err("something behind a name"),
        }
    }
}

/// Expands one element of the list; returns the remaining list.
fn one<'l>(list: &'l str, hosts: &mut Vec<String>) -> Result<&'l str, &'static str> {
    let mut names = vec![String::new()];
    let mut rest = list;
    while !rest.is_empty() && !rest.starts_with(',') {
        rest = match rest.strip_prefix('[') {
            Some(inside) => {
                let (ranges, behind) = inside
                    .split_once(']')
                    .ok_or("a bracket that is not closed")?;
                names = combine(&names, &numbers(ranges)?)?;
                behind
            }
            None => {
                let end = rest.find([',', '[']).unwrap_or(rest.len());
                let (part, behind) = rest.split_at(end);
                let allowed =
                    |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
                if !part.chars().all(allowed) {
                    return Err("a letter that no host has in its name");
                }
                names.iter_mut().for_each(|name| name.push_str(part));
                behind
            }
        };
        if names.iter().any(|name| name.len() > LONGEST) {
            return Err("a name that is too long");
        }
    }
    if names.iter().any(String::is_empty) {
        return Err("an empty name");
    }
    if hosts.len() + names.len() > MOST {
        return Err("too many hosts");
    }
    hosts.append(&mut names);
    Ok(rest)
}

/// Combines every name with every number in Slurm's order: the last bracket varies first.
fn combine(names: &[String], numbers: &[String]) -> Result<Vec<String>, &'static str> {
    if names.len().saturating_mul(numbers.len()) > MOST {
        return Err("too many hosts");
    }
    let pairs = names
        .iter()
        .flat_map(|name| numbers.iter().map(move |number| format!("{name}{number}")));
    Ok(pairs.collect())
}

/// Expands `1,3-5,008-010`: numbers with leading zeros keep their width.
fn numbers(ranges: &str) -> Result<Vec<String>, &'static str> {
    let mut found = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| match text.bytes().all(|byte| byte.is_ascii_digit()) {
            true => text.parse::<u64>().ok(),
            false => None,
        };
        let (from, to) = number(first)
            .zip(number(last))
            .ok_or("a range that is none of numbers")?;
        if from > to {
            return Err("a range that runs backwards");
        }
        if to - from >= MOST as u64 || found.len() as u64 + (to - from) >= MOST as u64 {
            return Err("too many hosts");
        }
        let width = if first.starts_with('0') {
            first.len()
        } else {
            0
        };
        found.extend((from..=to).map(|number| format!("{number:0width$}")));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_slurm_writes_them() {
        for (list, hosts) in [
            ("node1", &["node1"][..]),
            ("n[1-3]", &["n1", "n2", "n3"]),
            ("n[08-10,2]", &["n08", "n09", "n10", "n2"]),
            ("a,b-c.d_e", &["a", "b-c.d_e"]),
            ("login,n[1,3],gpu[2]", &["login", "n1", "n3", "gpu2"]),
            ("r[1-2]n[1-2]x", &["r1n1x", "r1n2x", "r2n1x", "r2n2x"]),
            ("[7-8]", &["7", "8"]),
            ("n[0]", &["n0"]),
        ] {
            assert_eq!(expand(list).unwrap(), hosts, "{list}");
        }
        for broken in [
            "",
            ",",
            "a,",
            ",a",
            "a,,b",
            "n[",
            "n[1",
            "n]",
            "n[]",
            "n[-]",
            "n[1-]",
            "n[2-1]",
            "n[x]",
            "n[1-2",
            "a b",
            "ä",
            "n[1-9999999999]",
            "n[99999999999999999999]",
            "n[+1]",
            "n[[1]]",
            "n[1-65536][1-65536]",
        ] {
            assert!(expand(broken).is_err(), "{broken}");
        }
    }

    /// Typical names of a cluster, in Slurm's notation: ranges where numbers follow each
    /// other.
    #[test]
    fn what_was_written_is_what_is_read() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..2000 {
            let mut hosts: Vec<String> = Vec::new();
            let mut list: Vec<String> = Vec::new();
            for _ in 0..random.usize(1..5) {
                let prefix = *random
                    .choice(&["n", "gpu-a", "rack1.row2.n", "x-"])
                    .unwrap();
                let suffix = *random.choice(&["", ".cluster", "-ib0"]).unwrap();
                let width = random.usize(0..5);
                let mut ranges = Vec::new();
                for _ in 0..random.usize(1..4) {
                    let from = random.u64(0..2000);
                    let to = from + random.u64(0..4);
                    let text = |number: u64| format!("{number:0width$}");
                    // As long as the width does not matter, or the first number shows it.
                    let padded = text(from).starts_with('0');
                    if text(from).len() != text(to).len() && !padded {
                        continue;
                    }
                    ranges.push(match from == to {
                        true => text(from),
                        false => format!("{}-{}", text(from), text(to)),
                    });
                    hosts.extend((from..=to).map(|n| format!("{prefix}{}{suffix}", text(n))));
                }
                if !ranges.is_empty() {
                    list.push(format!("{prefix}[{}]{suffix}", ranges.join(",")));
                }
            }
            if !list.is_empty() {
                assert_eq!(expand(&list.join(",")), Ok(hosts), "{list:?}");
            }
        }
    }

    #[test]
    fn no_text_makes_it_panic_or_grow_beyond_its_limit() {
        let mut random = fastrand::Rng::with_seed(8);
        let letters: Vec<char> = "n[]-,019. ä".chars().collect();
        let mut understood = 0;
        for _ in 0..100_000 {
            let length = random.usize(0..24);
            let text: String = (0..length)
                .map(|_| *random.choice(&letters).unwrap())
                .collect();
            if let Ok(hosts) = expand(&text) {
                understood += 1;
                assert!(!hosts.is_empty() && hosts.len() <= MOST, "{text}");
                assert!(hosts.iter().all(|host| !host.is_empty()), "{text}");
            }
        }
        assert!(understood > 1000, "{understood}");
    }
}
