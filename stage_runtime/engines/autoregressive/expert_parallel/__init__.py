"""The experts of a mixture, spread over the engines of one instance: what each keeps (`experts`), what they tell each
other (`meetings`).
"""
