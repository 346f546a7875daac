//! Node selectors from `JAVA_TOOL_OPTIONS`, where Terrakube installations keep them (contract 3.1).

use std::collections::BTreeMap;

use job_contract::java_options::words;

const PREFIXES: &[&str] = &["-Dio.terrakube.", "-Dorg.terrakube."];
const NODE_SELECTOR: &[&str] = &[
    "executor.ephemeral.nodeSelector",
    "executor.ephemeral.node-selector",
];

/// The selector that the options set. Other options are ignored. The last of equal keys wins.
pub(super) fn node_selector(options: &str) -> BTreeMap<String, String> {
    words(options)
        .iter()
        .filter_map(|word| {
            let property = PREFIXES.iter().find_map(|p| word.strip_prefix(p))?;
            let rest = NODE_SELECTOR
                .iter()
                .find_map(|n| property.strip_prefix(n))?;
            let (key, value) = if let Some(bracketed) = rest.strip_prefix('[') {
                let (key, rest) = bracketed.split_once(']')?;
                (key, rest.strip_prefix('=').unwrap_or_default())
            } else {
                let plain = rest.strip_prefix('.')?;
                plain.split_once('=').unwrap_or((plain, ""))
            };
            let key = key.trim().trim_matches(['\'', '"']);
            Some((key.to_owned(), value.trim().to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    #[rstest]
    #[case("", &[])]
    #[case("-Xmx512m -Dfoo=bar -Djava.net.useSystemProxies=true", &[])]
    #[case(
        "-Dorg.terrakube.executor.ephemeral.nodeSelector.diskType=ssd \
         -Dorg.terrakube.executor.ephemeral.nodeSelector.nodeType=spot",
        &[("diskType", "ssd"), ("nodeType", "spot")]
    )]
    #[case("-Dio.terrakube.executor.ephemeral.nodeSelector.pool=tf", &[("pool", "tf")])]
    #[case("-Dio.terrakube.executor.ephemeral.node-selector.pool=tf", &[("pool", "tf")])]
    #[case("\"-Dio.terrakube.executor.ephemeral.nodeSelector.pool=a b\"", &[("pool", "a b")])]
    #[case("-Dio.terrakube.executor.ephemeral.nodeSelector.pool='tf'", &[("pool", "tf")])]
    #[case("-Dio.terrakube.executor.ephemeral.nodeSelector[kubernetes.io/os]=linux", &[("kubernetes.io/os", "linux")])]
    #[case("-Dio.terrakube.executor.ephemeral.nodeSelector[\"kubernetes.io/os\"]=linux", &[("kubernetes.io/os", "linux")])]
    #[case("-Dio.terrakube.executor.ephemeral.nodeSelector.kubernetes.io/os=linux", &[("kubernetes.io/os", "linux")])]
    #[case("-Dio.terrakube.executor.ephemeral.nodeSelector.a=1\t-Dorg.terrakube.executor.ephemeral.nodeSelector.a=2", &[("a", "2")])]
    #[case("-Dio.terrakube.executor.ephemeral.nodeSelector.gpu", &[("gpu", "")])]
    #[case("-Dio.terrakube.executor.ephemeral.nodeSelectorX=1 -Dcom.terrakube.executor.ephemeral.nodeSelector.a=1", &[])]
    #[case("-Dio.terrakube.executor.ephemeral.nodeSelector[broken=1", &[])]
    #[case("-Dio.terrakube.executor.ephemeral.image=x 'unclosed", &[])]
    fn only_node_selectors_are_read(#[case] options: &str, #[case] expected: &[(&str, &str)]) {
        let expected: BTreeMap<String, String> = expected
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        assert_eq!(node_selector(options), expected);
    }

    proptest! {
        #[test]
        fn no_input_makes_the_reader_panic(rest in "[-D.=\\[\\]'\" a-z]{0,40}") {
            node_selector(&format!("-Dio.terrakube.executor.ephemeral.nodeSelector{rest}"));
        }
    }
}
