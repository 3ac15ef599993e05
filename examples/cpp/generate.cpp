// Continues a prompt, in C++:  generate MODEL [PROMPT]

#include <iostream>
#include <string_view>

#include <xserv.hpp>

int main(int argc, char **argv) {
  if (argc < 2) {
    std::cerr << "usage: generate MODEL [PROMPT]\n";
    return 2;
  }
  try {
    xserv::Model model(argv[1]);
    auto request = xserv::Request::from_prompt(argc > 2 ? argv[2] : "Once upon a time");
    auto result = model.generate(request.max_tokens(64), [](std::string_view text) {
      std::cout << text << std::flush;
      return std::cout.good();
    });
    std::cout << '\n';
    std::cerr << "[" << result.info().num_tokens << " tokens]\n";
  } catch (const xserv::Error &error) {
    std::cerr << "generate: " << error.what() << " (" << error.status_name() << ")\n";
    return 1;
  }
}
