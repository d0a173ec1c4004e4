# From `cargo metadata` to a CycloneDX 1.5 document of what is linked into the programs: packages reached from $roots
# over normal dependencies. No clock and no random number, so that the same commit gives the same bytes.
. as $meta
| (.packages | map({key: .id, value: .}) | from_entries) as $package
| (.resolve.nodes | map({key: .id, value: [.deps[] | select(any(.dep_kinds[]; .kind == null)) | .pkg]}) | from_entries) as $needs
| def reached($from): reduce $from[] as $id ({}; .[$id] = true)
    | until((keys - (.done // [])) - ["done"] == []; . as $seen
        | ((keys - (.done // [])) - ["done"]) as $new
        | reduce $new[] as $id ($seen; reduce $needs[$id][] as $need (.; .[$need] = true))
        | .done = ((.done // []) + $new))
    | keys - ["done"];
  def ref: "pkg:cargo/\(.name)@\(.version)";
  ([.packages[] | select(.name as $name | $roots | index([$name])) | .id]) as $ours
| reached($ours) as $all
| {
    bomFormat: "CycloneDX",
    specVersion: "1.5",
    version: 1,
    metadata: {
      timestamp: $date,
      component: {type: "application", "bom-ref": "cni-plugins", name: "cni-plugins", version: $version,
                  licenses: [{expression: "Apache-2.0"}]}
    },
    components: [$all[] | $package[.] | {
        type: (if .id as $id | $ours | index([$id]) then "application" else "library" end),
        "bom-ref": ref, name, version, purl: ref,
        licenses: [{expression: (.license | gsub("/"; " OR "))}],
        externalReferences: (if .repository then [{type: "vcs", url: .repository}] else [] end)
      }] | sort_by(."bom-ref"),
    dependencies: ([{ref: "cni-plugins", dependsOn: [$ours[] | $package[.] | ref] | sort}]
      + [$all[] | {ref: ($package[.] | ref), dependsOn: [$needs[.][] | $package[.] | ref] | sort}] | sort_by(.ref))
  }
