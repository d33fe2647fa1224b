"""The speculation controller: acceptance estimates and the cost model that choose K per round."""
