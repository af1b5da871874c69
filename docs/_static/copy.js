// A button on each block of code that copies it: of a console or a doctest, what is typed, without the prompts.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const lines = block.querySelector("pre").innerText.split("\n");
      const prompt = lines.some((line) => line.startsWith(">>> ")) ? /^(>>>|\.\.\.)( |$)/ : /^\$ /;
      const typed = lines.filter((line) => prompt.test(line)).map((line) => line.replace(prompt, ""));
      await navigator.clipboard.writeText((typed.length ? typed : lines).join("\n"));
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1000);
    });
    block.append(button);
  }
});
