//! The log entries in the sources are those that the page lists.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::Outcome;
use crate::listed::{Table, listed};

fn sources(directory: &Path, into: &mut Vec<PathBuf>) -> Outcome {
    for entry in directory.read_dir()? {
        let path = entry?.path();
        if path.is_dir() {
            sources(&path, into)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
    Ok(())
}

/// One use of a macro of `tracing`.
struct Said {
    /// The levels of its uses, where it is in a macro `log` of the crate's own, which takes the level.
    levels: Vec<String>,
    in_log_macro: bool,
    name: String,
    target: String,
    fields: Vec<String>,
}

/// Finds all uses in a file.
fn find(tokens: TokenStream, found: &mut Vec<Said>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for (at, token) in tokens.iter().enumerate() {
        if let TokenTree::Group(group) = token {
            find(group.stream(), found);
        }
        if let ("log", Some(level)) = (&token.to_string()[..], level_of(&tokens[at + 1..]))
            && let Some(said) = found.last_mut().filter(|said| said.in_log_macro)
        {
            said.levels.push(level);
        }
        if token.to_string() != "tracing" {
            continue;
        }
        // `tracing :: [$] name ! ( … )`
        let rest: Vec<&TokenTree> = tokens[at + 1..].iter().take(6).collect();
        let texts: Vec<String> = rest.iter().map(|token| token.to_string()).collect();
        let (which, own, bang) = match texts.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            [":", ":", "$", ref which, "!", ..] => (which.to_string(), true, 4),
            [":", ":", ref which, "!", ..] => (which.to_string(), false, 3),
            _ => continue,
        };
        let Some(TokenTree::Group(group)) = rest.get(bang + 1) else {
            continue;
        };
        if group.delimiter() == Delimiter::Parenthesis {
            let is_span = which.ends_with("_span");
            let level = (!own).then(|| which.trim_end_matches("_span").to_owned());
            let said = arguments(group.stream(), level.into_iter().collect(), is_span);
            found.push(Said {
                in_log_macro: own,
                ..said
            });
        }
    }
}

/// The level of a use of `log`, from the tokens after its name.
fn level_of(rest: &[TokenTree]) -> Option<String> {
    let [bang, TokenTree::Group(group), ..] = rest else {
        return None;
    };
    (bang.to_string() == "!").then(|| group.stream().to_string())
}

fn arguments(tokens: TokenStream, levels: Vec<String>, is_span: bool) -> Said {
    let text = |token: &TokenTree| token.to_string().trim_matches('"').to_owned();
    let mut said = Said {
        levels,
        in_log_macro: false,
        name: String::new(),
        target: String::new(),
        fields: Vec::new(),
    };
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for argument in tokens.split(|token| matches!(token, TokenTree::Punct(p) if p.as_char() == ','))
    {
        let words: Vec<String> = argument.iter().map(|token| token.to_string()).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            ["name", ":", _] => said.name = text(&argument[2]),
            ["target", ":", _] => said.target = text(&argument[2]),
            [literal] if literal.starts_with('"') && is_span && said.name.is_empty() => {
                said.name = text(&argument[0]);
            }
            // The message, and its arguments.
            [literal, ..] if literal.starts_with('"') => break,
            ["?" | "%", field] => said.fields.push(field.to_owned()),
            [] => {}
            _ => {
                let name = words.iter().take_while(|word| **word != "=");
                said.fields.push(name.copied().collect());
            }
        }
    }
    said
}

#[test]
fn the_page_lists_what_the_sources_say() -> Outcome {
    let mut files = Vec::new();
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    sources(&root.join("nccl/src"), &mut files)?;
    for entry in std::fs::read_dir(root.join("crates"))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("nccl-") {
            sources(&entry.path().join("src"), &mut files)?;
        }
    }
    let mut said = Table::new();
    for file in files {
        let tokens: TokenStream = std::fs::read_to_string(&file)?.parse()?;
        let mut found = Vec::new();
        find(tokens, &mut found);
        for one in found {
            let place = file.display();
            assert!(!one.name.is_empty(), "{place}: an event without a name");
            assert_eq!(one.target, "nccl", "{place}: {}", one.name);
            let entry = said.entry(one.name).or_default();
            entry.levels.extend(one.levels);
            entry.fields.extend(one.fields);
        }
    }
    let listed = listed();
    let names = |table: &Table| table.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(&said), names(&listed));
    for (name, entry) in &listed {
        assert_eq!(said[name], *entry, "{name}");
        // Entries about a communicator name the rank in every numbering.
        if name.starts_with("nccl.comm.") {
            for field in ["comm", "world_ranks", "rank", "world_rank", "launcher_rank"] {
                assert!(entry.fields.contains(field), "{name} has no {field}");
            }
        }
    }
    Ok(())
}
