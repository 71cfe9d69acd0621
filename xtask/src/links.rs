//! `links`: fails for every link in a page of this repository that leads to a missing file or heading.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use crate::arguments::Arguments;
use crate::{Result, workspace};

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    let root = workspace::root();
    let mut headings = BTreeMap::new();
    let mut broken = Vec::new();
    let mut checked = 0;
    for page in pages(root)? {
        let text = fs::read_to_string(root.join(&page))?;
        for link in of_page(&text) {
            let Some((target, anchor)) = local(&page, link.target) else {
                continue;
            };
            checked += 1;
            if let Some(why) = problem(root, &target, anchor, &mut headings) {
                broken.push(format!("{}: ({}) {why}", page.display(), link.target));
            }
        }
    }
    eprintln!("{}", verdict(checked, &broken)?);
    Ok(())
}

/// Returns the message of success. A repository without links is one whose pages were not found.
fn verdict(checked: usize, broken: &[String]) -> Result<String> {
    if !broken.is_empty() {
        return Err(broken.join("\n").into());
    }
    match checked {
        0 => Err("links: no link was checked".into()),
        checked => Ok(format!("links: {checked} lead to something")),
    }
}

/// Returns the pages of the repository, by their paths in it.
pub(crate) fn pages(root: &Path) -> Result<Vec<PathBuf>> {
    let mut list = Command::new("git");
    list.args(["ls-files", "--cached", "--others", "--exclude-standard"]);
    // A hook of git sets the first two, for the repository that it belongs to.
    list.env_remove("GIT_DIR").env_remove("GIT_INDEX_FILE");
    let files = workspace::output(list.arg("*.md").current_dir(root))?;
    let there = files.lines().map(PathBuf::from);
    Ok(there.filter(|page| root.join(page).exists()).collect())
}

/// A link `[text](target)`, and its position in the page.
pub(crate) struct Link<'t> {
    pub(crate) whole: std::ops::Range<usize>,
    pub(crate) text: &'t str,
    pub(crate) target: &'t str,
}

/// Returns the links of a page, without those in blocks of code and in code spans.
pub(crate) fn of_page(page: &str) -> Vec<Link<'_>> {
    let mut links = Vec::new();
    for (start, text) in paragraphs(page) {
        let mut from = 0;
        while let Some(middle) = text[from..].find("](").map(|at| at + from) {
            from = middle + 2;
            let Some(end) = text[from..].find(')').map(|at| at + from) else {
                break;
            };
            let is_code = text[..middle].matches('`').count() % 2 == 1;
            let Some(open) = opening(&text[..middle]).filter(|_| !is_code) else {
                continue;
            };
            links.push(Link {
                whole: start + open..start + end + 1,
                text: &text[open + 1..middle],
                target: &text[from..end],
            });
        }
    }
    links
}

/// Returns the parts of a page between empty lines and blocks of code, with their positions: a link's text may span lines.
fn paragraphs(page: &str) -> Vec<(usize, &str)> {
    let mut paragraphs: Vec<(usize, usize)> = Vec::new();
    let mut end = None;
    for (start, line) in lines_of_text(page) {
        match paragraphs.last_mut() {
            Some(last) if end == Some(start) && !line.trim().is_empty() => {
                last.1 = start + line.len()
            }
            _ => paragraphs.push((start, start + line.len())),
        }
        end = Some(start + line.len());
    }
    let text = |(start, end): (usize, usize)| (start, &page[start..end]);
    paragraphs.into_iter().map(text).collect()
}

/// Returns the position of the bracket that matches the closing bracket after `text`.
fn opening(text: &str) -> Option<usize> {
    let mut depth = 0;
    for (at, character) in text.char_indices().rev() {
        match character {
            ']' => depth += 1,
            '[' if depth == 0 => return Some(at),
            '[' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Returns the lines outside of blocks of code, with their positions.
fn lines_of_text(page: &str) -> Vec<(usize, &str)> {
    let mut lines = Vec::new();
    let mut is_code = false;
    let mut start = 0;
    for line in page.split_inclusive('\n') {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            lines.push((start, line));
        }
        start += line.len();
    }
    lines
}

/// Returns the file and the heading that a link of a page leads to; `None` for a link out of the repository.
pub(crate) fn local<'t>(page: &Path, target: &'t str) -> Option<(PathBuf, Option<&'t str>)> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = match target.split_once('#') {
        Some((file, anchor)) => (file, Some(anchor)),
        None => (target, None),
    };
    if file.is_empty() {
        return Some((page.to_owned(), anchor));
    }
    let mut path = PathBuf::new();
    for part in page.parent()?.join(file).components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            Component::CurDir => {}
            other => path.push(other),
        }
    }
    Some((path, anchor))
}

fn problem(
    root: &Path,
    target: &Path,
    anchor: Option<&str>,
    headings: &mut BTreeMap<PathBuf, Vec<String>>,
) -> Option<&'static str> {
    if !root.join(target).exists() {
        return Some("is no file");
    }
    let anchor = anchor?;
    let known = headings.entry(target.to_owned()).or_insert_with(|| {
        let text = fs::read_to_string(root.join(target)).unwrap_or_default();
        anchors(&text)
    });
    let is_known = known.iter().any(|one| one == anchor);
    (!is_known).then_some("is no heading of that page")
}

/// Returns the anchors of the headings of a page: lower case, without punctuation, with hyphens for spaces.
fn anchors(page: &str) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    for (_, line) in lines_of_text(page) {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let kept = heading.trim().chars().filter_map(|one| match one {
            ' ' => Some('-'),
            one if one.is_alphanumeric() || "-_".contains(one) => Some(one),
            _ => None,
        });
        let anchor: String = kept.flat_map(char::to_lowercase).collect();
        let before = anchors
            .iter()
            .filter(|one| {
                **one == anchor
                    || one.rsplit_once('-').is_some_and(|(head, number)| {
                        head == anchor && number.parse::<usize>().is_ok()
                    })
            })
            .count();
        anchors.push(match before {
            0 => anchor,
            before => format!("{anchor}-{before}"),
        });
    }
    anchors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_outside_of_code() {
        let page = "a [`b`](c.md#d) and `[e](f)`\n```\n[g](h)\n```\n[one [two]](i) [j](https://k)\n\n[l\nm](n)";
        let found: Vec<_> = of_page(page)
            .iter()
            .map(|link| (link.text, link.target, &page[link.whole.clone()]))
            .collect();
        let expected = [
            ("`b`", "c.md#d", "[`b`](c.md#d)"),
            ("one [two]", "i", "[one [two]](i)"),
            ("j", "https://k", "[j](https://k)"),
            ("l\nm", "n", "[l\nm](n)"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_broken_link_fails_and_so_do_no_links_at_all() {
        let said = verdict(7, &[]).unwrap();
        assert_eq!(said, "links: 7 lead to something");
        let broken = ["README.md: (a.md) is no file".to_owned()];
        let error = verdict(7, &broken).unwrap_err().to_string();
        assert!(error.contains("a.md"), "{error}");
        assert!(verdict(0, &[]).is_err());
    }

    #[test]
    fn pages_that_git_does_not_list_are_an_error() {
        let directory = tempfile::tempdir().unwrap();
        // No repository, wherever temporary directories are.
        fs::write(directory.path().join(".git"), "gitdir: absent\n").unwrap();
        fs::write(directory.path().join("page.md"), "[a](b)\n").unwrap();
        let error = pages(directory.path()).unwrap_err().to_string();
        assert!(error.contains("ls-files"), "{error}");
    }

    #[test]
    fn targets_are_paths_of_the_repository() {
        let of = |target| local(Path::new("docs/a.md"), target);
        assert_eq!(of("b.md#c"), Some((PathBuf::from("docs/b.md"), Some("c"))));
        assert_eq!(of("../README.md"), Some((PathBuf::from("README.md"), None)));
        assert_eq!(of("#c"), Some((PathBuf::from("docs/a.md"), Some("c"))));
        assert_eq!(of("https://example.org/#c"), None);
    }

    #[test]
    fn headings_become_anchors() {
        let page = "# From `cudarc::nccl`\n## A, b\n```\n# no heading\n```\n## A, b\n#none\n";
        assert_eq!(anchors(page), ["from-cudarcnccl", "a-b", "a-b-1"]);
    }
}
