// The bearer token, where the router asks for one: kept for this tab only, sent to this router only.
const KEY = "weir-token";
const field = document.getElementById("token");

export function authorized(headers = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...headers, authorization: `Bearer ${token}` } : headers;
}

export function askForToken(wanted) {
  document.getElementById("locked").hidden = !wanted;
}

export function whenGiven(again) {
  document.getElementById("locked").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, field.value.trim());
    field.value = "";
    again();
  });
}
