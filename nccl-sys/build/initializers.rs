//! Reads the `..._INITIALIZER` macros of a `nccl.h`, which bindgen skips, and writes them as
//! Rust constants of the same name, which are also the defaults of their types.
//!
//! The values come from the macro and the field names, in the same order, from the struct that
//! bindgen made, so that a header with more or fewer fields needs no change here. A value of a kind
//! not seen before is an error, never a guess.

use std::error::Error;
use std::fmt::Write as _;

/// Generates one constant for every initializer macro in `header`. `types` is bindgen's output for
/// the same header.
pub(super) fn generate(header: &str, types: &str) -> Result<String, Box<dyn Error>> {
    let mut out = String::from("use super::types::*;\nuse crate::constants::*;\n");
    for (name, values) in macros(header) {
        let type_name = values
            .first()
            .and_then(|v| v.strip_prefix("sizeof("))
            .and_then(|v| v.strip_suffix(")"))
            .ok_or_else(|| format!("{name} does not begin with the size of its struct"))?;
        let fields = fields(types, type_name)?;
        // The size, the magic number and the release alone: the rest is what NCCL writes, and zero before.
        let is_answer = values.len() == 3;
        if fields.len() != values.len() && !is_answer {
            return Err(format!(
                "{name} has {} values, {type_name} has {} fields",
                values.len(),
                fields.len()
            )
            .into());
        }
        write!(out, "\npub const {name}: {type_name} = {type_name} {{\n")?;
        for ((field, field_type), value) in fields.iter().zip(&values) {
            writeln!(
                out,
                "    {field}: {},",
                expression(value, field_type, type_name, types)?
            )?;
        }
        for (field, field_type) in fields.iter().skip(values.len()) {
            writeln!(out, "    {field}: {},", zero(field_type))?;
        }
        out.push_str("};\n");
        writeln!(
            out,
            "impl Default for {type_name} {{ fn default() -> Self {{ {name} }} }}",
        )?;
    }
    Ok(out)
}

/// Returns `(macro name, its values)` for each `#define X_INITIALIZER { … }`.
fn macros(header: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    let mut lines = header.lines();
    while let Some(line) = lines.next() {
        let Some((name, rest)) = line
            .strip_prefix("#define ")
            .and_then(|l| l.trim_start().split_once(char::is_whitespace))
        else {
            continue;
        };
        if !name.ends_with("_INITIALIZER") {
            continue;
        }
        let mut body = String::new();
        let mut piece = rest;
        while let Some(continued) = piece.trim_end().strip_suffix('\\') {
            body.push_str(continued);
            piece = lines.next().unwrap_or_default();
        }
        body.push_str(piece);
        let body = without_comments(&body);
        let values = split_values(body.trim().trim_start_matches('{').trim_end_matches('}'));
        found.push((name.to_owned(), values));
    }
    found
}

/// Returns the values between the commas, except commas inside of parentheses.
fn split_values(body: &str) -> Vec<String> {
    let mut depth = 0;
    let values = body.split(|c| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => (),
        }
        c == ',' && depth == 0
    });
    values
        .map(str::trim)
        .filter(|value| !value.is_empty())
        .map(str::to_owned)
        .collect()
}

fn without_comments(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("/*") {
        out.push_str(before);
        rest = after.split_once("*/").map_or("", |(_, after)| after);
    }
    out.push_str(rest);
    out
}

/// Returns `(name, type)` of the fields of the struct behind the typedef `type_name`, in order. Does not
/// depend on the layout of `types`.
fn fields(types: &str, type_name: &str) -> Result<Vec<(String, String)>, Box<dyn Error>> {
    let types = types.split_whitespace().collect::<Vec<_>>().join(" ");
    let between = |opening: &str, closing: char| {
        let start = types.find(opening)? + opening.len();
        Some(
            types[start..]
                .split(closing)
                .next()
                .unwrap_or_default()
                .trim(),
        )
    };
    let struct_name = between(&format!("pub type {type_name} = "), ';').unwrap_or(type_name);
    let body = between(&format!("pub struct {struct_name} {{"), '}')
        .ok_or_else(|| format!("no struct for {type_name} among the generated types"))?;
    let field = |text: &str| {
        let (name, field_type) = text.trim().strip_prefix("pub ")?.split_once(':')?;
        Some((name.trim().to_owned(), field_type.trim().to_owned()))
    };
    Ok(body.split(',').filter_map(field).collect())
}

/// Returns the zero of `field_type`: an integer, a `bool`, an array of them, or an enum.
fn zero(field_type: &str) -> String {
    let field_type = field_type.trim();
    if let Some((element, length)) = field_type
        .strip_prefix('[')
        .and_then(|array| array.strip_suffix(']')?.split_once(';'))
    {
        return format!("[{}; {}]", zero(element), length.trim());
    }
    match field_type {
        "bool" => "false".into(),
        _ if field_type.starts_with("nccl") => format!("{field_type}(0)"),
        _ => "0".into(),
    }
}

/// Returns the Rust expression for `value` in a field of `field_type` of the struct `of`.
fn expression(
    value: &str,
    field_type: &str,
    of: &str,
    types: &str,
) -> Result<String, Box<dyn Error>> {
    // Matches `pub const NAME: type = …`, in any layout.
    let enumerator = types
        .split("pub const ")
        .filter_map(|rest| rest.split_once('=')?.0.split_once(':'))
        .find(|(name, _)| name.trim() == value)
        .map(|(_, of)| of.trim())
        .filter(|of| of.starts_with("nccl"));
    let constant = field_type.starts_with("*const") || field_type.starts_with("* const");
    let pointer = field_type.starts_with('*') || field_type.starts_with("cuda");
    Ok(match value {
        _ if value.starts_with("sizeof(") => format!("size_of::<{of}>()"),
        "NULL" | "NCCL_CONFIG_UNDEF_PTR" if constant => "core::ptr::null()".into(),
        "NULL" | "NCCL_CONFIG_UNDEF_PTR" if pointer => "core::ptr::null_mut()".into(),
        "NCCL_VERSION_CODE" | "NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH)" => {
            format!("NCCL_VERSION_CODE as {field_type}")
        }
        "true" | "false" => value.into(),
        "NCCL_API_MAGIC" | "NCCL_CONFIG_UNDEF_INT" | "NCCL_UNDEF_FLOAT" => value.into(),
        // An enumerator, in a field of its enum or of a plain integer type.
        _ if enumerator.is_some_and(|of| of == field_type) => format!("{field_type}::{value}"),
        _ if enumerator.is_some() => {
            format!(
                "{}::{value}.0 as {field_type}",
                enumerator.unwrap_or_default()
            )
        }
        _ if value
            .strip_prefix("0x")
            .is_some_and(|v| u64::from_str_radix(v, 16).is_ok())
            || value.parse::<i64>().is_ok() =>
        {
            value.to_lowercase()
        }
        _ => {
            return Err(
                format!("the initializer of {of} has the value `{value}`, which is new").into(),
            );
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPES: &str = "
        pub struct inner_v1 { pub size : usize , pub magic : :: core :: ffi :: c_uint ,
            pub version : :: core :: ffi :: c_uint , pub name : * const :: core :: ffi :: c_char ,
            pub blocking : :: core :: ffi :: c_int , pub mode : ncclMode_t , }
        pub type inner_t = inner_v1;
        impl ncclMode_t { pub const ncclModeOn : ncclMode_t = ncclMode_t (1) ; }";

    fn constant(values: &str) -> Result<String, Box<dyn Error>> {
        generate(
            &format!("#define X_INITIALIZER {{ \\\n {values} \\\n}}\n"),
            TYPES,
        )
    }

    #[test]
    fn values_get_the_names_and_types_of_the_fields_in_order() {
        let text = constant(
            "sizeof(inner_t), /* a, b */ NCCL_API_MAGIC, \\\n \
             NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH), NULL, NCCL_CONFIG_UNDEF_INT, ncclModeOn,",
        );
        let text = text.unwrap();
        for line in [
            "pub const X_INITIALIZER: inner_t = inner_t {",
            "size: size_of::<inner_t>(),",
            "magic: NCCL_API_MAGIC,",
            "version: NCCL_VERSION_CODE as :: core :: ffi :: c_uint,",
            "name: core::ptr::null(),",
            "blocking: NCCL_CONFIG_UNDEF_INT,",
            "mode: ncclMode_t::ncclModeOn,",
        ] {
            assert!(
                text.lines().any(|found| found.trim() == line),
                "{line} is not in\n{text}"
            );
        }
    }

    #[test]
    fn a_value_too_few_is_an_error() {
        let error = constant("sizeof(inner_t), NCCL_API_MAGIC")
            .unwrap_err()
            .to_string();
        assert_eq!(error, "X_INITIALIZER has 2 values, inner_t has 6 fields");
    }

    #[test]
    fn what_nccl_fills_in_is_zero_before() {
        let types = "
            pub struct answer { pub size : usize , pub magic : :: core :: ffi :: c_uint ,
                pub version : :: core :: ffi :: c_uint , pub rank : :: core :: ffi :: c_int ,
                pub has : [ bool ; 64usize ] , pub mode : ncclMode_t , }
            pub type answer_t = answer;";
        let header = "#define X_INITIALIZER \\\n { \\\n sizeof(answer_t), /* size */ \\\n \
                      NCCL_API_MAGIC, NCCL_VERSION_CODE, \\\n }\n";
        let text = generate(header, types).unwrap();
        for line in ["rank: 0,", "has: [false; 64usize],", "mode: ncclMode_t(0),"] {
            assert!(
                text.lines().any(|found| found.trim() == line),
                "{line} is not in\n{text}"
            );
        }
    }

    #[test]
    fn a_value_of_a_new_kind_is_an_error_that_quotes_it() {
        let error = constant("sizeof(inner_t), 1, 2, NULL, frobnicate(3), ncclModeOn");
        assert!(error.unwrap_err().to_string().contains("`frobnicate(3)`"));
    }
}
