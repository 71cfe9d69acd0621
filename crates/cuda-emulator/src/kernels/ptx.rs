//! Reads the kernels of a PTX module, and the sizes of their parameters.
//!
//! The bodies of kernels are skipped. Images other than PTX text (a cubin, a fat binary) are not read.

/// A kernel of a module.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
}

/// The position of an argument in the argument buffer of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameter {
    pub(crate) offset: usize,
    pub(crate) size: usize,
}

/// Why a module cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unreadable(pub String);

/// Returns the kernels of a PTX text.
///
/// # Errors
/// [`Unreadable`] if the text is not PTX, or the parameters of a kernel have an unknown form.
pub(crate) fn entries(text: &str) -> Result<Vec<Entry>, Unreadable> {
    let text = without_comments(text);
    let words: Vec<&str> = words(&text).collect();
    if words.first() != Some(&".version") || !words.contains(&".target") {
        return Err(Unreadable(
            "it does not begin with .version and .target".to_owned(),
        ));
    }
    let mut entries = Vec::new();
    let mut rest = words.iter().copied();
    while let Some(word) = rest.next() {
        if word == ".entry" {
            let name = rest.next().unwrap_or_default().to_owned();
            let parameters = match rest.next() {
                Some("(") => {
                    let list: Vec<_> = rest.by_ref().take_while(|&word| word != ")").collect();
                    parameters(&list)
                }
                // A kernel without parameters.
                _ => Some(Vec::new()),
            };
            let parameters = parameters.ok_or_else(|| {
                Unreadable(format!("the parameters of {name} are of no known form"))
            })?;
            entries.push(Entry { name, parameters });
        }
    }
    Ok(entries)
}

/// Each is `.param [.align N] .TYPE [attributes] NAME[[N]]`.
fn parameters(list: &[&str]) -> Option<Vec<Parameter>> {
    let mut parameters = Vec::new();
    let mut end = 0usize;
    for one in list
        .split(|&word| word == ",")
        .filter(|one| !one.is_empty())
    {
        let mut words = one.iter().copied().peekable();
        if words.next() != Some(".param") {
            return None;
        }
        let (mut align, mut size) = (None, None);
        let mut elements = 1usize;
        while let Some(word) = words.next() {
            match word {
                ".align" => align = Some(words.next()?.parse().ok()?),
                // An attribute of a pointer parameter; the alignment that follows is that of the memory, not of the parameter.
                ".ptr" => {
                    while words.peek().is_some_and(|word| word.starts_with('.')) {
                        if words.next() == Some(".align") {
                            words.next();
                        }
                    }
                }
                "[" => elements = words.next()?.parse().ok()?,
                "]" => {}
                _ if word.starts_with('.') => size = Some(size_of_type(word)?),
                // The name.
                _ => {}
            }
        }
        let size: usize = size?;
        let offset = end.checked_next_multiple_of(align.unwrap_or(size))?;
        let size = size.checked_mul(elements)?;
        end = offset.checked_add(size)?;
        parameters.push(Parameter { offset, size });
    }
    Some(parameters)
}

fn size_of_type(word: &str) -> Option<usize> {
    match word {
        ".u8" | ".s8" | ".b8" => Some(1),
        ".u16" | ".s16" | ".b16" | ".f16" | ".bf16" => Some(2),
        ".u32" | ".s32" | ".b32" | ".f32" | ".f16x2" => Some(4),
        ".u64" | ".s64" | ".b64" | ".f64" => Some(8),
        _ => None,
    }
}

fn without_comments(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        let (before, comment) = rest.split_at(at);
        clean += before;
        rest = if comment.starts_with("//") {
            comment.find('\n').map_or("", |end| &comment[end..])
        } else if comment.starts_with("/*") {
            clean.push(' ');
            comment.find("*/").map_or("", |end| &comment[end + 2..])
        } else {
            clean.push('/');
            &comment[1..]
        };
    }
    clean + rest
}

/// Returns the words of a text; each separator is also a word.
fn words(text: &str) -> impl Iterator<Item = &str> {
    const SIGNS: [char; 8] = ['(', ')', '{', '}', ',', ';', '[', ']'];
    text.split_whitespace().flat_map(|chunk| {
        chunk.split_inclusive(SIGNS).flat_map(|part| {
            let (word, sign) = match part.char_indices().last() {
                Some((at, last)) if SIGNS.contains(&last) => part.split_at(at),
                _ => (part, ""),
            };
            [word, sign].into_iter().filter(|word| !word.is_empty())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_kernel(head: &str) -> Result<Vec<Entry>, Unreadable> {
        entries(&format!(
            ".version 7.0 .target sm_70 .address_size 64 {head} {{ ret; }}"
        ))
    }

    fn parameters_of(list: &str) -> Vec<(usize, usize)> {
        let entries = of_kernel(&format!(".entry k({list})")).unwrap();
        let parameters = entries[0].parameters.iter();
        parameters.map(|one| (one.offset, one.size)).collect()
    }

    #[test]
    fn kernels_are_found_with_their_parameters() {
        let text = "//\n// Generated by a compiler: .entry not_me()\n.version 8.3 /* .entry nor_me */\n\
            .target sm_90\n.address_size 64\n\
            .func (.param .b32 r) helper(.param .b64 a) { ret; }\n\
            .visible .entry first(\n\t.param .u64 first_param_0,\n\t.param .f32 first_param_1\n)\n\
            .maxntid 256, 1, 1\n{\n\tld.param.u64 %rd1, [first_param_0];\n\tret;\n}\n\
            .visible .entry second()\n{\n\tret;\n}\n.entry third { ret; }";
        let entries = entries(text).unwrap();
        let names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["first", "second", "third"]);
        assert_eq!(entries[1].parameters, []);
        assert_eq!(entries[2].parameters, []);
    }

    #[test]
    fn parameters_lie_where_a_struct_would_have_them() {
        assert_eq!(
            parameters_of(".param .u8 a, .param .u64 b, .param .b16 c, .param .f32 d"),
            [(0, 1), (8, 8), (16, 2), (20, 4)]
        );
        assert_eq!(
            parameters_of(".param .u32 n, .param .align 8 .b8 s[24], .param .align 16 .b8 t[3]"),
            [(0, 4), (8, 24), (32, 3)]
        );
        assert_eq!(
            parameters_of(".param .u32 n, .param .u64 .ptr .global .align 4 p, .param .s32 m"),
            [(0, 4), (8, 8), (16, 4)]
        );
        assert_eq!(parameters_of(""), []);
    }

    #[test]
    fn what_is_no_ptx_is_refused() {
        assert!(entries("").is_err());
        assert!(entries("extern \"C\" __global__ void k() {}").is_err());
        assert!(entries(".version 7.0 .entry k() { ret; }").is_err());
        let error = of_kernel(".entry k(.param .texref t)").unwrap_err();
        assert!(error.0.contains('k'), "{error:?}");
    }
}
