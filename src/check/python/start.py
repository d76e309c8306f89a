"""How the interpreter starts: what it is, where it looks, and what ran before the first line. Prints one line of JSON. Python 3.8 and later."""
import json
import os
import sys

before = sorted(sys.modules)


def origin(module):
    return getattr(module, "__file__", None)


def find(name):
    # Looks without importing anything.
    from importlib.machinery import PathFinder

    try:
        spec = PathFinder.find_spec(name)
    except Exception:
        return None
    if spec is None:
        return None
    if spec.origin and spec.origin not in ("namespace", "built-in"):
        return spec.origin
    places = list(spec.submodule_search_locations or [])
    return places[0] if places else None


def startup_files(folders):
    # Lines of .pth files that `site` executes.
    found = []
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if not name.endswith(".pth"):
                continue
            path = os.path.join(folder, name)
            try:
                with open(path, "rb") as file:
                    text = file.read(1 << 20).decode("utf-8", "replace")
            except OSError:
                continue
            lines = [line.strip() for line in text.splitlines() if line.startswith(("import ", "import\t"))]
            places = [
                line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("import ", "import\t", "#"))
            ]
            if lines or places:
                found.append({"path": path, "code": [line[:200] for line in lines[:5]], "adds": places[:20]})
    return found


site = sys.modules.get("site")
user_site = None
user_enabled = None
folders = []
if site is not None:
    user_enabled = bool(getattr(site, "ENABLE_USER_SITE", False))
    try:
        user_site = site.getusersitepackages()
    except Exception:
        user_site = None
    try:
        folders = list(site.getsitepackages())
    except Exception:
        folders = []
folders = [path for path in folders if os.path.isdir(path)]
if user_enabled and user_site and os.path.isdir(user_site):
    folders.append(user_site)
sites = [path for path in sys.path if path and os.path.basename(path) in ("site-packages", "dist-packages") and os.path.isdir(path)]
result = {
    "version": "%d.%d.%d" % sys.version_info[:3],
    "implementation": sys.implementation.name,
    "executable": sys.executable,
    "prefix": sys.prefix,
    "base_prefix": sys.base_prefix,
    "path": sys.path[1:] if sys.path and sys.path[0] in ("", os.path.dirname(os.path.abspath(sys.argv[0] or "."))) else sys.path,
    "sites": sites,
    "user_site": user_site,
    "user_site_enabled": user_enabled,
    "user_site_exists": bool(user_site and os.path.isdir(user_site)),
    "sitecustomize": origin(sys.modules["sitecustomize"]) if "sitecustomize" in sys.modules else None,
    "usercustomize": origin(sys.modules["usercustomize"]) if "usercustomize" in sys.modules else None,
    "pth": startup_files(folders),
    "loaded": len(before),
    "torch": find("torch"),
    "torch_loaded": "torch" in before,
}
print(json.dumps(result))
