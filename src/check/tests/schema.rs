//! The committed JSON schema, and as much of a validator as it uses (JSON Schema 2020-12: type, const, enum, properties, required,
//! additionalProperties, items, `$ref` to `$defs`, minimum, maximum). Anything else in the schema fails the test.

use serde_json::Value;

const SCHEMA: &str = include_str!("../../../docs/schemas/check.schema.json");

/// Fails the test unless `document` is as the schema says.
#[track_caller]
pub fn validate(document: &Value) {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let mut faults = Vec::new();
    check(&schema, &schema, document, "", &mut faults);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn is_type(value: &Value, name: &str) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("the schema has a type `{other}`"),
    }
}

fn check(root: &Value, schema: &Value, value: &Value, at: &str, faults: &mut Vec<String>) {
    let Some(rules) = schema.as_object() else { return };
    for (rule, argument) in rules {
        match rule.as_str() {
            "$schema" | "$id" | "title" | "description" | "$defs" => {}
            "$ref" => {
                let pointer = argument.as_str().unwrap().strip_prefix('#').unwrap();
                check(root, root.pointer(pointer).unwrap_or_else(|| panic!("no {pointer}")), value, at, faults);
            }
            "type" => {
                let names: Vec<&str> = match argument {
                    Value::String(name) => vec![name],
                    Value::Array(names) => names.iter().map(|name| name.as_str().unwrap()).collect(),
                    _ => panic!("a type that is none"),
                };
                if !names.iter().any(|name| is_type(value, name)) {
                    faults.push(format!("{at}: {value} is no {}", names.join(" or ")));
                }
            }
            "const" => {
                if value != argument {
                    faults.push(format!("{at}: {value} is not {argument}"));
                }
            }
            "enum" => {
                if !argument.as_array().unwrap().contains(value) {
                    faults.push(format!("{at}: {value} is none of {argument}"));
                }
            }
            "minimum" => {
                if value.as_f64().is_some_and(|value| value < argument.as_f64().unwrap()) {
                    faults.push(format!("{at}: {value} is less than {argument}"));
                }
            }
            "required" => {
                for name in argument.as_array().unwrap() {
                    if value.is_object() && value.get(name.as_str().unwrap()).is_none() {
                        faults.push(format!("{at}: {name} is missing"));
                    }
                }
            }
            "properties" => {
                for (name, rule) in argument.as_object().unwrap() {
                    if let Some(part) = value.get(name) {
                        check(root, rule, part, &format!("{at}/{name}"), faults);
                    }
                }
            }
            "additionalProperties" => {
                assert_eq!(argument, &Value::Bool(false));
                let known = rules["properties"].as_object().unwrap();
                for name in value.as_object().into_iter().flatten().map(|(name, _)| name).filter(|name| !known.contains_key(*name)) {
                    faults.push(format!("{at}: {name} is not in the schema"));
                }
            }
            "items" => {
                for (index, part) in value.as_array().into_iter().flatten().enumerate() {
                    check(root, argument, part, &format!("{at}/{index}"), faults);
                }
            }
            other => panic!("the schema has a rule `{other}`"),
        }
    }
}

#[test]
fn the_validator_finds_what_is_wrong() {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    for document in [serde_json::json!({}), serde_json::json!([]), serde_json::json!({ "schema_version": 2, "steps": [{ "id": "x" }] })] {
        let mut faults = Vec::new();
        check(&schema, &schema, &document, "", &mut faults);
        assert!(!faults.is_empty(), "{document}");
    }
}
